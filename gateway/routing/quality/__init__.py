"""The quality watch, which checks with golden prompts that the answers of replicas are right."""
