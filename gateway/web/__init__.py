"""The pages at `/` and `/admin`: their files, and the protection of requests of browsers."""
