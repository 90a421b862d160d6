"""The step stream between an engine and its gateways.

The package has the subscriptions of gateways, their submissions, and the messages that are sent
after each step.
"""
