"""What stands between a layer's products: norms, rotary embedding, writing of keys and values."""
