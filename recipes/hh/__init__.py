"""What `ppo_hh.py` and its siblings share: dialogues, tiny models, measurements and the report."""
