//! The bytes of saved activations: what [`leanstream_core::act`] decides is done here.
