//! TCP connections whose ends have proved to each other that they have the key of the ranks. Each message has a tag: nobody else
//! can read in the place of an end, or write what it reads. What is sent is not encrypted.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;
use steersman_rank_control::hello::{Answer, Client, Key, Nonce, Refused, Seal, Server, Unseal};

use super::control::line;

/// Time in which a connection proves that it has the key.
const HELLO: Duration = Duration::from_secs(5);

/// Most bytes of a message before both ends have proved that.
const HELLO_BYTES: usize = 1024;

/// Proves to the other end of `stream`, which has connected, that this one has `key`. Returns what it says of itself.
///
/// # Errors
/// If it does not prove that it has the key, too, within five seconds for each message.
pub fn welcome(stream: TcpStream, key: Key) -> Result<(String, Output, Input)> {
    stream.set_nonblocking(false)?;
    prepare(&stream)?;
    let (server, challenge) = Server::new(key, nonce()?);
    (&stream).write_all(&line(&challenge))?;
    let answer: Answer = read_line(&stream)?;
    let (welcome, seal, unseal) = server.welcome(&answer)?;
    (&stream).write_all(&line(&welcome))?;
    let (output, input) = ends(stream, seal, unseal)?;
    Ok((answer.about, output, input))
}

/// Proves to the other end of `stream`, which has accepted the connection, that this one has `key`, and says `about` of itself.
///
/// # Errors
/// If the other end does not prove that it has the key, too, within five seconds for each message: [`Refused::OtherKey`] if it
/// has another one.
pub fn introduce(stream: TcpStream, key: Key, about: &str) -> Result<(Output, Input)> {
    prepare(&stream)?;
    let challenge = read_line(&stream)?;
    let (client, answer) = Client::answer(key, &challenge, nonce()?, about)?;
    (&stream).write_all(&line(&answer))?;
    // It ends the connection if it has another key.
    let welcome = read_line(&stream).map_err(|error| {
        let is_ended = error.downcast_ref().is_some_and(|error: &io::Error| {
            [ErrorKind::UnexpectedEof, ErrorKind::ConnectionReset].contains(&error.kind())
        });
        if is_ended { error.context(Refused::OtherKey) } else { error }
    })?;
    let (seal, unseal) = client.welcomed(&welcome)?;
    ends(stream, seal, unseal)
}

fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(HELLO))
}

fn ends(stream: TcpStream, seal: Seal, unseal: Unseal) -> Result<(Output, Input)> {
    stream.set_read_timeout(None)?;
    let input = Input { stream: stream.try_clone()?, unseal, plain: Vec::new(), read: 0 };
    Ok((Output { stream, seal }, input))
}

fn nonce() -> Result<Nonce> {
    let mut nonce = Nonce::default();
    getrandom::fill(&mut nonce).context("reading random numbers")?;
    Ok(nonce)
}

/// One message, byte by byte: what follows it is not read.
fn read_line<T: DeserializeOwned>(mut stream: &TcpStream) -> Result<T> {
    let (mut line, end) = (Vec::new(), Instant::now() + HELLO);
    while line.len() < HELLO_BYTES {
        // One byte now and then must not hold the connection.
        let left = end.checked_duration_since(Instant::now()).context("it takes too long")?;
        stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        match byte {
            [b'\n'] => return Ok(serde_json::from_slice(&line)?),
            [byte] => line.push(byte),
        }
    }
    bail!("the other end is no rank")
}

/// The end of a connection that writes messages.
pub struct Output {
    stream: TcpStream,
    seal: Seal,
}

impl Output {
    /// The connection.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Ends the connection, in both directions.
    pub fn end(&self) {
        // Fails if it has ended.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl Write for Output {
    fn write(&mut self, message: &[u8]) -> io::Result<usize> {
        let sealed = self.seal.seal(message).map_err(io::Error::other)?;
        self.stream.write_all(&sealed)?;
        Ok(message.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// The end of a connection that reads the texts of messages.
pub struct Input {
    stream: TcpStream,
    unseal: Unseal,
    plain: Vec<u8>,
    /// Bytes of `plain` that have been read.
    read: usize,
}

impl Read for Input {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.read == self.plain.len() {
            if let Some(message) = self.unseal.next_message().map_err(io::Error::other)? {
                (self.plain, self.read) = (message, 0);
                continue;
            }
            let mut bytes = [0; 16 << 10];
            match self.stream.read(&mut bytes)? {
                0 => return Ok(0),
                count => self.unseal.add(&bytes[..count]),
            }
        }
        let count = into.len().min(self.plain.len() - self.read);
        into[..count].copy_from_slice(&self.plain[self.read..self.read + count]);
        self.read += count;
        Ok(count)
    }
}
