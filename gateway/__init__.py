"""OpenAI's and Anthropic's APIs in front of Triton Inference Server.

`app.py` puts the packages together; `settings.py` and `errors.py` belong to all of them.
"""
