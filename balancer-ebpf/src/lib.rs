//! The data plane.
#![no_std]
