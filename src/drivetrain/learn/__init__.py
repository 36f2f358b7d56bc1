"""Learn distributed training by writing it: exercises, checked on real processes.

The material is in `course/`: templates, guidelines, hints and solutions. What learners write
replaces a piece of a real training, and `checks/` holds it against one process, byte by byte.
"""
