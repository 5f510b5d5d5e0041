//! The connections between a server and the machines that join it, each of which runs one rank.
//!
//! A machine connects, proves that it has the key, and says at which port its rank can be reached. It gets a rank, and then
//! what the [`Supervisor`](steersman_rank_control::Supervisor) tells its [`Agent`](steersman_rank_control::Agent).

use std::io::{self, BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use steersman_engine::config::ModelConfig;
use steersman_rank_control::hello::Key;
use steersman_rank_control::{FromAgent, ToAgent};

use super::Over;
use super::control::{line, read};
use super::sealed::{Input, Output, introduce, welcome};

/// Time in which the other end takes a message. Its thread reads all the time.
const TAKE: Duration = Duration::from_secs(1);

/// Time in which a machine is reached.
const REACH: Duration = Duration::from_secs(5);

/// Most connections that prove at one time that they have the key. Further ones are ended at once.
const HELLOS: usize = 16;

/// Pause after a connection that could not be accepted, as when the process has too many files.
const PAUSE: Duration = Duration::from_millis(100);

/// What a server tells a machine.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum ToMachine {
    /// It has this rank, whose process is computed like this.
    Seat {
        /// The rank.
        rank: usize,
        /// What carries the arrays.
        over: Over,
        /// How the model is computed. The machine has its own path and device.
        config: Box<ModelConfig>,
    },
    /// There is no rank for it.
    Full,
    /// What its agent is told.
    Agent(ToAgent),
}

/// What a machine tells a server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromMachine {
    /// The port at which its next process can be reached.
    Port(u16),
    /// What its agent says.
    Agent(FromAgent),
}

/// What happens to the connection with this number.
pub enum LinkEvent<T> {
    /// It is there.
    Up(u64, Link),
    /// The other end says something.
    Said(u64, T),
    /// It has ended.
    Down(u64),
}

/// One end of a connection.
pub struct Link {
    output: Output,
    /// The address of the other end.
    pub other: SocketAddr,
    /// The address of this end.
    pub own: IpAddr,
    /// What the other end said of itself when it connected.
    pub about: String,
}

impl Link {
    /// Sends `message`. The connection ends if the other end does not take it.
    pub fn send(&mut self, message: &impl Serialize) {
        if let Err(error) = self.output.write_all(&line(message)) {
            tracing::debug!(%error, "a message between machines is lost");
            self.output.end();
        }
    }

    /// An open end, whose messages go to `hear` on another thread, until [`LinkEvent::Down`].
    fn open<T: DeserializeOwned>(
        number: u64,
        about: String,
        (output, input): (Output, Input),
        hear: impl Fn(LinkEvent<T>) + Send + 'static,
    ) -> Result<()> {
        let stream = output.stream();
        stream.set_write_timeout(Some(TAKE))?;
        let (other, own) = (stream.peer_addr()?, stream.local_addr()?.ip());
        let mut input = BufReader::new(input);
        hear(LinkEvent::Up(number, Self { output, other, own, about }));
        let listen = move || {
            while let Ok(Some(message)) = next(&mut input) {
                hear(LinkEvent::Said(number, message));
            }
            hear(LinkEvent::Down(number));
        };
        thread::Builder::new().name("machine".into()).spawn(listen)?;
        Ok(())
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.output.end();
    }
}

fn next<T: DeserializeOwned>(input: &mut impl BufRead) -> io::Result<Option<T>> {
    read(input).inspect_err(|error| match error.kind() {
        io::ErrorKind::InvalidData => {
            tracing::warn!(%error, "the other machine has another version of Steersman");
        }
        _ => tracing::debug!(%error, "a connection between machines ends"),
    })
}

/// Accepts machines with `key` at `listener` until the process ends. What happens goes to `hear`.
///
/// # Errors
/// If a thread cannot be started.
pub fn accept(
    listener: TcpListener,
    key: Key,
    hear: impl Fn(LinkEvent<FromMachine>) + Clone + Send + 'static,
) -> Result<()> {
    let hellos = Arc::new(());
    let accept = move || {
        for number in 0.. {
            let Ok((stream, from)) = listener.accept() else {
                thread::sleep(PAUSE);
                continue;
            };
            // One for this function, and one for each connection.
            if Arc::strong_count(&hellos) > HELLOS {
                continue;
            }
            let (key, hear, hello) = (key.clone(), hear.clone(), hellos.clone());
            let greet = move || {
                let opened = welcome(stream, key).and_then(|(about, output, input)| {
                    Link::open(number, about, (output, input), hear)
                });
                if let Err(error) = opened {
                    tracing::warn!(%from, %error, "a connection of a machine is refused");
                }
                drop(hello);
            };
            // Without a thread the connection ends.
            let _ = thread::Builder::new().name("hello".into()).spawn(greet);
        }
    };
    thread::Builder::new().name("machines".into()).spawn(accept)?;
    Ok(())
}

/// Connects to the server at `address`, and says that the rank of this machine can be reached at `port`.
///
/// # Errors
/// If nobody is there, or has another key:
/// [`Refused::OtherKey`](steersman_rank_control::hello::Refused::OtherKey).
pub fn connect(
    address: &str,
    key: Key,
    port: u16,
    number: u64,
    hear: impl Fn(LinkEvent<ToMachine>) + Send + 'static,
) -> Result<()> {
    let connecting = || format!("connecting to {address}");
    let addresses = std::net::ToSocketAddrs::to_socket_addrs(address).with_context(connecting)?;
    let mut tried = Err(io::ErrorKind::AddrNotAvailable.into());
    for address in addresses {
        tried = TcpStream::connect_timeout(&address, REACH);
        if tried.is_ok() {
            break;
        }
    }
    let stream = tried.with_context(connecting)?;
    let ends = introduce(stream, key, &port.to_string())?;
    Link::open(number, String::new(), ends, hear)
}
