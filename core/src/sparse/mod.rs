//! Sparse layers: which units a token needs, which are kept, which are read, and when.
//!
//! A *unit* is what one neuron needs beyond its gate (an up row and a down column), or one row of
//! the head. Units are chosen while a pass runs: from the gate's output, or from a sketch's.
//!
//! - [`store`]: the state machine; its [`tables`] are lent to it.
//! - [`choice`]: what a layer chose; [`fetch`]: which reads follow from it.
//! - [`head`]: which rows of the head can still win.
//! - `listed`: which slots may be taken, in order of worth (`buckets`).
//! - [`drive`]: what runs it beside the dense engine.
//! - [`retain`]: what a resident unit is worth, one policy a file.

mod bits;
mod buckets;
pub mod choice;
pub mod counters;
pub mod drive;
pub mod fetch;
pub mod head;
mod listed;
mod log2;
pub mod retain;
pub mod store;
pub mod tables;
mod use_count;

pub use choice::{Choice, Chosen, Grouping, Select};
pub use counters::Counters;
pub use drive::{Beside, UnitEvent, Units};
pub use fetch::Reach;
pub use store::{Delivery, Fault, ReadRequest, Store};
