"""The chat page: its files, and what protects a browser's requests."""
