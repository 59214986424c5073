//! The controller: reads what the XDP program counted, chooses, and writes the selection rings.

pub mod clock;
