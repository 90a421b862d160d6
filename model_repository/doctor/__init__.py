"""`llmops doctor`: what a machine, or an image, can do, each check with the fix.

`machine` looks at what `serve` needs here; `image` holds a container against its row of facts;
`deep` imports, parses and starts what can be tried without a GPU, and is the last step of `docker
build`.
"""
