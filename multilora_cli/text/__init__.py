"""Text on one side, token ids on the other: tokenizer, chat template, incremental decoding."""
