"""The quality watch: golden prompts that show whether the answers of replicas are still right."""
