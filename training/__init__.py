"""How the bundled English model is made: data, trainer, evaluation, card. Not part of the package; see README.md."""
