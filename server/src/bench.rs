//! The commands of `steersman bench` that compute in this process, and so need the engine. The others are clients of
//! servers, in the program `steersman-bench`.

pub mod model;
pub mod shape;
