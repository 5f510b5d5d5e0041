//! Runs one request without the server: `cargo run -p steersman-engine --example embed -- MODEL_FOLDER`.

use std::path::PathBuf;

use steersman_engine::Error;
use steersman_engine::config::Config;
use steersman_engine::request::{Event, Message, Request};

fn main() -> Result<(), Error> {
    let model = PathBuf::from(std::env::args().nth(1).expect("usage: embed MODEL_FOLDER"));
    let data = std::env::temp_dir().join("steersman-embed");
    let config = Config::default().check()?;
    let policies = steersman_engine::policies(&config, &data)?;
    let (engine, thread) = steersman_engine::start(config, &model, &data, policies)?;
    let message =
        Message { role: "user".into(), content: "Who are you?".into(), ..Message::default() };
    let request =
        Request { profile: "default".into(), messages: vec![message], ..Request::default() };
    let mut events = engine.submit(request)?;
    while let Some(event) = events.blocking_recv() {
        match event {
            Event::Reasoning(text) | Event::Answer(text) => print!("{text}"),
            Event::Failed(error) => return Err(error),
            Event::Finished(_) => println!(),
            _ => {}
        }
    }
    // The thread ends when the last handle is dropped and all state is on disk.
    drop(engine);
    let _ = thread.join();
    Ok(())
}
