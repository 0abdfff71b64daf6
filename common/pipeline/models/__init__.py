"""Models as the loop knows them: the protocol of all, and the bases of flow-match models."""
