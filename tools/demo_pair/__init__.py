"""The recipe of the demo pair that `cbatch.demo` ships: data, training, evaluation, model card."""
