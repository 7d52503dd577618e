"""What a trained model is asked, and how good its answers are."""
