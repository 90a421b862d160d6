"""The step stream: subscriptions, the requests that travel together, and the messages that go out.

What is generated in a step belongs to `loop.py` and its runtime.
"""
