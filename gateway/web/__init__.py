"""The chat page: its files, and the protection of requests that a browser sends."""
