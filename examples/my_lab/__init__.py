"""Parts of a user's own: a loss, an env, a torso and a metrics writer, with no edit inside flaxrl."""
