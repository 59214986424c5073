//! The XDP program.
#![no_std]
#![no_main]
