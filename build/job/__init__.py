"""One build from checkpoint to engine folder: started, resumed, looked at (--dry-run), upgraded."""
