"""One file per endpoint: body in, answer or event stream out."""
