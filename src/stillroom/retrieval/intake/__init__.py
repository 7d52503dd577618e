"""Files on their way in: found, read side by side in processes of their own, watched."""
