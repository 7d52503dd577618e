"""Makes the bundled English model: data, trainer, evaluation, model card. Not part of the package; see README.md."""
