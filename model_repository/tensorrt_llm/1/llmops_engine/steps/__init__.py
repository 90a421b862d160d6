"""The step stream: subscriptions, the requests that travel together, and the messages that go out."""
