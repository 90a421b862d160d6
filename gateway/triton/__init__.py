"""The tensor contract: tensors, the stream client, replicas and their health. Knows nothing of OpenAI."""
