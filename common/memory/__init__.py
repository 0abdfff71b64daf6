"""What a picture takes of memory and time, stage by stage, and how much of it this machine gives."""
