"""What training code imports."""
