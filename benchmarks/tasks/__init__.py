"""What a model is asked, and how an answer is scored, in 0..1, or None: tasks with long answers, random schemas."""
