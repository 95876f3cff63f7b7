"""Target transformers as pure functions over parameter trees."""
