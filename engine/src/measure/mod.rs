//! What the commands `verify`, `calibrate`, `bench model` and `doctor` run: measurements of a loaded model and of the
//! machine. Serving knows none of it.

pub mod calibrate;
pub mod machine;
pub mod passes;
pub mod verify;
