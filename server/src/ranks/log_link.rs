//! The connections over which the other ranks read the first one's log. What is sent has tokens, and is not encrypted.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use steersman_engine::tools::ranks::Outputs;
use steersman_rank_control::hello::Key;

use super::sealed::{introduce, welcome};

/// Time in which the others connect. They are started together with the first one.
const CONNECT: Duration = Duration::from_secs(60);

/// Pause before another attempt.
const PAUSE: Duration = Duration::from_millis(20);

/// A connection's rank, and the output that it reads.
type Connected = (usize, Box<dyn Write + Send>);

/// Waits at `listener` until each of the `count` ranks but the first has connected and proved that it has `key`. Returns what
/// each reads, in their order.
///
/// # Errors
/// If one has not within a minute.
pub fn accept(listener: &TcpListener, key: &Key, count: usize) -> Result<Outputs> {
    listener.set_nonblocking(true)?;
    let (sender, connected) = channel();
    let end = Instant::now() + CONNECT;
    let mut outputs: Vec<Option<Box<dyn Write + Send>>> = (1..count).map(|_| None).collect();
    while outputs.iter().any(Option::is_none) {
        ensure!(Instant::now() < end, "another rank did not connect to the log within a minute");
        match listener.accept() {
            Ok((stream, _)) => welcome_on_thread(stream, key.clone(), sender.clone())?,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::sleep(PAUSE),
            Err(error) => return Err(error).context("accepting connections to the log"),
        }
        for (rank, output) in connected.try_iter() {
            match outputs.get_mut(rank.wrapping_sub(1)) {
                Some(missing @ None) => *missing = Some(output),
                _ => tracing::warn!(rank, "a second connection of a rank to the log is refused"),
            }
        }
    }
    Ok(outputs.into_iter().flatten().collect())
}

/// A stranger that connects and says nothing must not keep the ranks from connecting.
fn welcome_on_thread(stream: TcpStream, key: Key, connected: Sender<Connected>) -> Result<()> {
    let welcome = move || match rank_of(stream, key) {
        Ok(rank_and_output) => drop(connected.send(rank_and_output)),
        Err(error) => tracing::warn!(%error, "a connection to the log is refused"),
    };
    thread::Builder::new().name("hello".into()).spawn(welcome)?;
    Ok(())
}

fn rank_of(stream: TcpStream, key: Key) -> Result<Connected> {
    let (rank, output, _) = welcome(stream, key)?;
    Ok((rank.parse().context("the rank of a connection")?, Box::new(output)))
}

/// Connects to the log at `address` as `rank`, with `key`.
///
/// # Errors
/// If nobody is there within a minute, or the other end has another key.
pub fn connect(address: &str, key: Key, rank: usize) -> Result<impl BufRead> {
    let end = Instant::now() + CONNECT;
    let stream = loop {
        match TcpStream::connect(address) {
            Ok(stream) => break stream,
            Err(error) if Instant::now() > end => {
                return Err(error).with_context(|| format!("connecting to the log at {address}"));
            }
            // The first rank does not listen yet.
            Err(_) => thread::sleep(PAUSE),
        }
    };
    let (_, input) = introduce(stream, key, &rank.to_string())?;
    Ok(BufReader::new(input))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> Key {
        Key::new(text.as_bytes()).unwrap()
    }

    const KEY: &str = "a key of sixteen or more";

    #[test]
    fn ranks_read_the_lines_of_the_first_one() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let follow = |rank| {
            let address = address.clone();
            thread::spawn(move || {
                let input = connect(&address, key(KEY), rank).unwrap();
                input.lines().map(Result::unwrap).collect::<Vec<_>>()
            })
        };
        let followers = [follow(1), follow(2)];
        let mut outputs = accept(&listener, &key(KEY), 3).unwrap();
        outputs[0].write_all(b"one\ntwo\n").unwrap();
        outputs[0].write_all(format!("{}\n", "x".repeat(100_000)).as_bytes()).unwrap();
        outputs[1].write_all(b"other\n").unwrap();
        drop(outputs);
        let [first, second] = followers.map(|follower| follower.join().unwrap());
        assert_eq!((&first[..2], first[2].len()), (&["one".into(), "two".into()][..], 100_000));
        assert_eq!(second, ["other"]);
    }

    #[test]
    fn strangers_do_not_keep_a_rank_from_connecting_and_are_refused() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let silent = TcpStream::connect(&address).unwrap();
        let mut loud = TcpStream::connect(&address).unwrap();
        loud.write_all(&[b'x'; 4096]).unwrap();
        let other = {
            let address = address.clone();
            thread::spawn(move || connect(&address, key("another key of letters"), 1).is_err())
        };
        let rank = thread::spawn(move || {
            thread::sleep(Duration::from_millis(100));
            let mut line = String::new();
            connect(&address, key(KEY), 1).unwrap().read_line(&mut line).unwrap();
            line
        });
        let mut outputs = accept(&listener, &key(KEY), 2).unwrap();
        outputs[0].write_all(b"for ranks\n").unwrap();
        assert_eq!(rank.join().unwrap(), "for ranks\n");
        assert!(other.join().unwrap());
        drop(silent);
    }
}
