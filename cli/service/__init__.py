"""llmops.yaml: one file that describes a service, from the laptop to the cluster, and what each command reads of it.

The settings of a running gateway belong to `gateway/settings.py`.
"""
