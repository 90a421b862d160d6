"""The web pages at `/` and `/admin`: their files, and the protection of browsers' requests."""
