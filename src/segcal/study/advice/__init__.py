"""The advice: which method to deploy, and why, in words."""
