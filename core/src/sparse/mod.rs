//! Sparse layers: which units a token needs, which are kept, which are read, and when.
//!
//! A *unit* is what one neuron needs beyond its gate (an up row and a down column), or one row of
//! the head. Units are chosen while a pass runs: from the gate's output, or from a sketch's.

pub mod retain;
