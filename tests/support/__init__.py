"""What the tests share: tiny models, recorders, oracles, and runs in processes of their own."""
