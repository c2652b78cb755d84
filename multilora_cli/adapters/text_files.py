"""The files that an adapter may bring for its text, beside config and weights."""

TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
GENERATION_NAME = "generation_config.json"
TEMPLATE_NAME = "chat_template.jinja"

BYTES_MAX = {
    TOKENIZER_NAME: 64 * 2**20,  # the largest in use, of 262,144 tokens, has 33 MB
    TOKENIZER_CONFIG_NAME: 16 * 2**20,
    GENERATION_NAME: 2**20,
    TEMPLATE_NAME: 256 * 2**10,
}


def text_files(*, tokenizer: bool, template: bool) -> tuple[str, ...]:
    """Names of what is read for one or both, optional files included."""
    names = (TOKENIZER_NAME, TOKENIZER_CONFIG_NAME, GENERATION_NAME) if tokenizer else ()
    if template:
        names = (*(names or (TOKENIZER_CONFIG_NAME,)), TEMPLATE_NAME)
    return names
