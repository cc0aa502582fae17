"""Jobs that learn from given data: supervised fine-tuning."""
