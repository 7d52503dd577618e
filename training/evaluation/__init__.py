"""Evaluation of a trained model: question sets, answers, scores, report."""
