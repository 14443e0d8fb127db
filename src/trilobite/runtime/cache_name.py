"""What transformers calls the keys and values of a text in arguments and results."""

from dataclasses import fields

from transformers.modeling_outputs import CausalLMOutputWithPast

OLD = "past_key_values"
"""Its name before transformers 5.24; newer ones still take it from callers."""
CACHE = OLD if OLD in {field.name for field in fields(CausalLMOutputWithPast)} else "cache"
"""Its name in the transformers that is installed."""
