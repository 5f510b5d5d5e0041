//! The program as a process: its signals, and the programs that it runs in its place.
#![cfg(unix)]

mod program;
mod ranks;
mod signals;
