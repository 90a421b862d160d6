"""The step stream: subscriptions of gateways, their submissions, and the messages that go out after
each step.
"""
