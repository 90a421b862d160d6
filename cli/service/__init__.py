"""llmops.yaml: one file that describes a service, from the laptop to the cluster.

The settings of a running gateway belong to `gateway/settings.py`.
"""
