"""Every sampled token under student and teacher."""
