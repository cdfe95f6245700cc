//! How many bits each saved tensor is worth.
