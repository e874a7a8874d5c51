"""Tasks with long answers: what is asked, and how an answer is scored. Scores are in 0..1, or None."""
