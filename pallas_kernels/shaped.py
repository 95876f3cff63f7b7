"""What a choice between kernels looks at: shape and type, of an array or of the description of one."""

import jax

Shaped = jax.Array | jax.ShapeDtypeStruct
