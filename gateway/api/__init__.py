"""One module per API: its routes, how a request is read, and how an answer is written in the
client's format.
"""
