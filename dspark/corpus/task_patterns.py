# ruff: noqa: E501 (a pattern is one line, however long)
"""Sentence patterns of the prompt generators, as data (the grammar is in `task_grammar`).

A list is one string, alternatives parted by ``|``. A block of patterns has one alternative a line;
``*3`` in front gives it weight 3. ``<slot>`` is replaced as `task_grammar.Grammar` says.
All of it was written for this project.
"""

__all__ = ["PATTERNS"]

PATTERNS: dict[str, str] = {
    "math_ask": r"""
*14
*3 Show your work.
*3 Think step by step.
*3 Explain each step.
*2 Let's think step by step and give the final answer as \boxed{...}.
*3 Solve it step by step and put the final answer in \boxed{}.
*2 Reason carefully, then write the answer inside \boxed{}.
*2 Work through the problem one step at a time. End with "The answer is" and the number.
Give only the number.
Write down the equations you use.
*2 First restate what is known, then solve.
Check your answer at the end.
Use short sentences.
Explain it as you would to a student in fifth grade.
Please reason through it in steps and box the result with \boxed{}.
Show the calculation for every step, then state the final answer on a new line.
Answer with a full sentence.
*2 Please show how you got the answer.
Break the solution into numbered steps.
""",
    "math_lead": """
*20
*2 Solve this problem:
Here is a word problem.
Can you help me with this?
*2 Question:
Please solve the following problem.
My teacher gave me this exercise:
Work out the answer.
I am stuck on this homework question:
""",
    "word_problem": """
<Person> buys <a:2-9> <ware> for $<b:4-30> each and <c:2-6> <ware2> for $<d:5-40> each. If <person> pays with <bills:3-9> hundred-dollar bills, how much change is there?
<Person> <job> for $<a:8-25> an hour. Last week <person> worked <b:3-9> hours on <day> and <c:2-8> hours on <day2>. How much did <person> earn?
<Person> <job> for $<a:9-22> an hour and wants to buy <goal> that costs $<b:150-600>. <Person> has already saved $<c:20-120>. How many hours of work are still needed?
A <shop> sells <ware> for $<a:6-45> each. On <day> it sold <b:8-40> of them and on <day2> it sold <c:2-4> times as many. How much money did it take in over the two days?
A <container> holds <a:6-24> <thing>. <Person> has <b:3-15> full <container>es and <c:1-20> loose <thing>. How many <thing> does <person> have in total?
There are <a:12-40> students in a class. Each of them brings <b:2-6> <thing>, and the teacher adds <c:10-50> more. The <thing> are shared equally among <d:3-8> tables. How many <thing> does each table get, and how many are left over?
A <vehicle> travels at <a:30-90> miles per hour for <b:2-6> hours and then at <c:20-70> miles per hour for <d:1-4> hours. How far does it travel altogether?
A <vehicle> leaves at <h:6-9> a.m. and covers <a:120-480> kilometers at an average speed of <b:40-80> kilometers per hour. It stops once for <c:15-45> minutes. At what time does it arrive?
<Person> reads <a:10-45> pages on <day>, twice as many on <day2>, and <b:5-30> pages on <day3>. The book has <c:200-420> pages. How many pages are left to read?
<Person> is <a:6-15> years old. <Person2> is <b:2-4> times as old, and <person3> is <c:2-9> years younger than <person2>. What is the sum of their ages?
In <a:3-12> years <person> will be twice as old as <person2> is now. <Person2> is <b:14-30>. How old is <person>?
A recipe for <b:4-8> people needs <a:2-6> cups of flour. <Person> is cooking for <c:10-40> people. How many cups of flour does <person> need?
A <single> costs $<a:20-160>. It is on sale for <pct> off, and <person> has a coupon for another $<b:2-10>. What does <person> pay?
<Person> bought a <single> for $<a:20-90> and sold it for <pct> more. How much profit did <person> make?
<Worker> makes <a:6-30> <product> an hour. After <b:2-5> hours a second one that makes <c:4-25> <product> an hour joins in. How many <product> have they made after <d:6-10> hours in total?
It takes <person> <a:2-9> hours to paint a room and <person2> <b:3-12> hours. How long does it take if they work together?
A tank holds <a:200-900> liters. It is filled at <b:10-40> liters a minute and leaks <c:1-8> liters a minute. How many minutes does it take to fill?
A farmer has <a:12-60> <animal> and <b:2-4> times as many <animal2>. <Frac> of the <animal2> are sold. How many animals are left on the farm?
<Person> plants <a:4-15> rows of <crop> plants with <b:6-20> plants in each row. <Pct> of the plants do not survive. How many plants are left?
Each <crop> plant gives <a:3-12> kilograms a season, and a kilogram sells for $<b:2-9>. <Person> has <c:15-60> plants and spent $<d:50-200> on seeds and water. What is the profit of the season?
Tickets to the <place> cost $<a:8-24> for adults and $<b:3-12> for children. A group of <c:4-20> adults and <d:6-40> children gets a discount of <pct>. How much does the group pay?
The <place> had <a:120-900> visitors on <day>. On <day2> it had <pct> more visitors, and on <day3> it had <b:20-90> fewer than on <day2>. How many visitors came on the three days?
<Person> runs <a:2-9> <unit> every day except <day>. How many <unit> is that in <b:3-12> weeks?
<Person> spends <a:15-50> minutes a day on <activity> from <day> through <day2> and <b:30-90> minutes on the other days of the week. How many hours is that in <c:2-6> weeks?
For a <event>, <person> orders <a:5-20> <food> cut into <b:4-8> pieces each. There are <c:8-40> guests, and each eats <d:1-4> pieces. How many pieces are left?
For a <event>, <person> needs <a:3-9> liters of <drink> for every <b:8-20> guests. <C:40-120> guests are coming, and a bottle holds 2 liters. How many bottles should <person> buy?
A piece of <material> is <a:24-240> <unit> long. <Person> cuts it into <b:3-8> equal parts and uses <c:1-2> of them. How many <unit> are left?
A rectangular garden is <a:6-40> <unit> long and <b:3-25> <unit> wide. Fencing costs $<c:3-18> per unit of length. How much does it cost to fence the whole garden?
A floor measures <a:3-12> meters by <b:2-9> meters. Tiles are <c:20-50> centimeters on each side and cost $<d:1-6> each. What do the tiles for the floor cost?
The average of <n:3-6> test scores is <a:70-90>. <Person> takes one more test and scores <b:60-100>. What is the new average?
<Person> has $<a:40-200>. <Person> spends <frac> of it on <ware> and then $<b:5-20> on lunch. How much money is left?
<Person> and <person2> share <a:24-180> <thing> in the ratio <b:1-5>:<c:2-7>. How many does each of them get?
A phone plan costs $<a:15-45> a month plus <b:2-15> cents a minute after the first <c:50-300> minutes. <Person> talked for <d:320-900> minutes in <month>. How much is the bill?
<Person> saves $<a:5-40> in the first week and $<b:2-9> more each week than in the week before. How much has <person> saved after <c:4-12> weeks?
The population of a town is <a:2000-30000>. It grows by <pct> in the first year and shrinks by <pct2> in the second. What is the population after two years?
A <pet> eats <a:40-250> grams of food a day. A bag holds <b:2-12> kilograms and costs $<c:8-35>. How much does <person> spend on food for the <pet> in <d:60-180> days?
<Person> has <a:20-90> coins, all of them dimes and quarters. Their value is $<b:5-15>. How many quarters are there?
Two <vehicle>s start <a:100-500> miles apart and move toward each other, one at <b:20-50> miles per hour and the other at <c:30-60> miles per hour. After how many hours do they meet?
<Person> bought <a:3-12> packs of <thing> with <b:6-20> in each pack. <Person> gave <c:4-15> to <person2> and then lost <frac> of the rest. How many <thing> does <person> have now?
A factory makes <a:120-900> <product> a day. <B:2-9> of every 100 are defective. How many good ones does it make in <c:5-30> days?
<Person> borrows $<a:500-5000> at a simple interest rate of <b:3-9>% a year. How much is owed after <c:2-6> years?
A school orders <a:200-900> notebooks in <container>es of <b:20-48>. Each <container> costs $<c:12-60>, and shipping is $<d:5-25>. What is the total cost?
<Person> walks <a:2-6> blocks in <b:5-15> minutes. At the same pace, how long does it take to walk <c:8-30> blocks?
A movie is <a:85-170> minutes long. It begins at <h:1-9>:<m:10-50> p.m. and has an intermission of <b:10-20> minutes. When does it end?
A bus starts with <a:15-45> passengers. At the first stop <b:3-12> get off and <c:2-15> get on. At the second stop <frac> of the passengers get off. How many are on the bus now?
A <shop> bought <a:30-120> <ware> for $<b:3-12> each. It sold <frac> of them for $<c:14-30> each and the rest for $<d:6-13> each. What was its profit?
The temperature was <a:50-90> degrees in the morning. It rose by <b:3-15> degrees until noon and fell by <c:8-30> degrees by night. What was the temperature at night?
In a <event> game, a red card is worth <a:2-9> points and a blue card <b:10-25> points. <Person> has <c:3-12> red cards and <d:2-8> blue cards, and <person2> has twice as many red cards but no blue ones. Who has more points, and by how many?
<Person> has a <a:4-20>-page report to print for <b:6-40> people. Paper comes in packs of <c:50-200> sheets, and each sheet takes two pages. How many packs are needed?
A water bottle holds <a:400-900> milliliters. <Person> drinks <b:2-5> bottles on school days and <c:1-4> on the weekend days. How many liters does <person> drink in a week?
""",
    "formal_math": r"""
Solve for $<var>$: $<a:2-9><var> + <b:1-40> = <c:41-120>$.
Solve for $<var>$: $<a:2-9>(<var> - <b:1-9>) = <c:2-9><var> + <d:1-30>$.
Solve the equation $<var>^2 - <a:3-15><var> + <b:2-40> = 0$.
Find all real solutions of $<a:2-5>x^2 + <b:3-19>x - <c:1-20> = 0$.
Factor the expression $x^2 + <a:3-17>x + <b:2-60>$ if possible.
Expand and simplify $(<a:2-9>x + <b:1-9>)(<c:2-9>x - <d:1-9>)$.
Simplify the fraction $\frac{<a:12-240>}{<b:15-360>}$.
Compute $\frac{<a:1-9>}{<b:2-12>} + \frac{<c:1-9>}{<d:2-15>}$ and give the result as a reduced fraction.
Compute $\frac{<a:1-9>}{<b:2-12>} \div \frac{<c:1-9>}{<d:2-15>}$.
If $f(x) = <a:2-9>x^2 - <b:1-9>x + <c:1-20>$, what is $f(<d:2-9>)$?
If $f(x) = <a:2-9>x + <b:1-9>$ and $g(x) = x^2 - <c:1-9>$, find $f(g(<d:1-6>))$.
Let $f(x) = \frac{<a:2-9>x + <b:1-9>}{x - <c:1-9>}$. Find the value of $x$ for which $f(x) = <d:2-9>$.
Find the sum of the first $<n:10-60>$ terms of the arithmetic sequence $<a:1-12>, <b:13-20>, \ldots$.
The first term of a geometric sequence is $<a:2-9>$ and the common ratio is $<r:2-4>$. What is the <n:4-8>th term?
What is the remainder when $<a:100-9999>$ is divided by $<b:7-23>$?
Find the greatest common divisor of $<a:24-600>$ and $<b:30-720>$.
Find the least common multiple of $<a:6-60>$, $<b:8-48>$ and $<c:4-20>$.
How many positive divisors does $<a:60-900>$ have?
Write the prime factorization of $<a:84-2400>$.
Is $<a:101-997>$ a prime number? Explain how you know.
What is the units digit of $<a:2-9>^{<n:11-60>}$?
What is $<a:12-99> \times <b:12-99>$?
What is $<a:1000-9999> - <b:100-999> + <c:10-99>$?
Evaluate $<a:2-9> + <b:2-9> \times (<c:10-30> - <d:2-9>)^2$.
Evaluate $\sqrt{<s:4-30>^2 + <t:3-25>^2}$ and simplify the radical if needed.
What is <pct> of $<a:40-900>$?
A number is increased by <pct> and the result is $<a:60-600>$. What was the number?
A triangle has sides of length $<a:5-12>$, $<b:6-13>$ and $<c:8-15>$. What is its perimeter, and is it a right triangle?
The legs of a right triangle are $<a:3-20>$ and $<b:4-24>$. Find the length of the hypotenuse.
A circle has radius $<r:2-25>$. Find its area and its circumference in terms of $\pi$.
The area of a circle is $<s:4-144>\pi$. What is its diameter?
A rectangle has a perimeter of $<a:20-90>$ and its length is $<b:1-9>$ more than its width. Find its area.
A cylinder has radius $<r:2-12>$ and height $<h:3-20>$. What is its volume in terms of $\pi$?
A cube has a surface area of $<a:24-600>$. Find its volume.
The angles of a triangle are in the ratio $<a:1-4>:<b:2-5>:<c:3-6>$. Find the largest angle.
Find the distance between the points $(<a:1-9>, <b:1-9>)$ and $(<c:10-20>, <d:1-15>)$.
Find the slope and the $y$-intercept of the line $<a:2-9>x + <b:2-9>y = <c:6-60>$.
Find the equation of the line through $(<a:1-6>, <b:1-9>)$ and $(<c:7-12>, <d:1-15>)$.
At what point do the lines $y = <a:2-6>x + <b:1-9>$ and $y = <c:7-11>x - <d:1-9>$ meet?
Solve the system $<a:1-5>x + y = <b:8-40>$ and $x - y = <c:1-12>$.
Find $x + y$ if $<a:2-7>x + <b:2-7>y = <c:20-60>$ and $x = y + <d:1-5>$.
If $2^{x} = <p:8-512>$, estimate $x$ and say whether it is an integer.
Simplify $x^{<a:2-9>} \cdot x^{<b:2-9>} \div x^{<c:1-4>}$.
Compute $\log_{<b:2-5>}(<b>^{<n:2-7>})$.
Convert $<a:20-340>$ degrees to radians.
What is the value of $\sin^2(<a:10-80>^\circ) + \cos^2(<a>^\circ)$? Explain.
Find the derivative of $f(x) = <a:2-9>x^{<n:2-5>} - <b:2-9>x + <c:1-9>$.
Compute $\int_0^{<a:1-6>} (<b:2-9>x + <c:1-9>)\,dx$.
How many ways are there to arrange the letters of the word "<arrange>"?
How many ways are there to choose $<k:2-4>$ students from a group of $<n:6-15>$?
Two fair dice are rolled. What is the probability that the sum is $<s:3-11>$?
A bag has $<a:2-9>$ red, $<b:2-9>$ blue and $<c:2-9>$ green marbles. Two are drawn without replacement. What is the probability that both are <color>?
A fair coin is flipped $<n:3-8>$ times. What is the probability of exactly $<k:1-3>$ heads?
What is the mean and the median of $<a:1-30>, <b:1-30>, <c:1-30>, <d:1-30>, <e:1-30>$?
The mean of five numbers is $<a:10-40>$. Four of them are $<b:5-20>$, $<c:5-30>$, $<d:10-40>$ and $<e:10-40>$. Find the fifth.
Convert the number $<a:20-500>$ from base ten to base <base>.
What is the sum of the digits of $<a:1000-99999>$?
Find the smallest positive integer $n$ such that $<a:3-15>n > <b:100-900>$.
Find the value of $|<a:2-20> - <b:21-60>| + |<c:1-9> - <d:10-30>|$.
Solve the inequality $<a:2-9>x - <b:1-20> < <c:21-80>$.
If $a \star b = <m:2-6>a + b^2$, what is $<a:2-9> \star <b:2-9>$?
The sum of <three> consecutive integers is $<a:30-300>$. What are they, if they exist?
Round $<a:100-999>.<b:1001-9999>$ to the nearest tenth.
A sequence begins with $<a:1-9>$, and each term is <r:2-4> times the one before plus $<b:1-6>$. Find the fifth term.
""",
    "chat": """
*2 Explain <topic> to <audience>.
*2 Explain <topic> in <length>.
*2 What is <topic>, and why does it matter?
What are the most common misconceptions about <topic>?
Give me a short history of <topic>.
*2 Explain the difference between <pair>.
Compare <pair> in a table with three rows.
Which is better for <audience>: <pair>? Give reasons for both sides.
Summarize what you know about <topic> in <length>.
Write a <tone> introduction to <topic> for <audience>.
Write three quiz questions about <topic>, each with four choices and the right answer marked.
What are five interesting facts about <topic>?
Describe an analogy that helps <audience> understand <topic>.
I have to give a talk about <topic> to <audience>. Draft an outline with an opening, three points and a closing.
Make a list of the key terms about <topic> with a one-line definition of each.
*2 <question>?
*2 <question>? Answer in <length>.
<question>? Explain it to <audience>.
<question>? Use a <tone> tone.
*2 List <n:5-12> <listof>.
List <n:3-10> <listof> and explain each in one sentence.
Give me <n:4-12> <listof> as a numbered list.
Brainstorm <n:5-15> <listof>. Be <tone>.
*2 Write a <genre> story about <storyseed>.
*2 Write a <form> about <storyseed>.
Write the first paragraph of a <genre> story that begins with <storyseed>.
Write a <tone> <form> about <storyseed> in <length>.
Continue this story: "It was a quiet <day> evening when <person> found <storyseed>."
Invent three titles for a <genre> novel about <storyseed>, and give each a one-sentence summary.
Write a dialogue between <role> and <role2> about <topic>.
*2 You are <role>. <question>?
Pretend to be <role> and explain <topic>.
Act as <role>. I will tell you my problem: <problem>. What do you say?
You are <role> who knows a lot about <topic>. Greet me and tell me something surprising.
*2 <Problem>. What can I do?
<Problem>. Give me <n:3-8> practical tips.
<Problem>. Give me advice in a <tone> tone.
Make a plan for someone who says: "<Problem>."
*2 Write a <tone> email <mailreason>.
Write an email <mailreason>. Sign it as <person>.
Write a short text message <mailreason>. Keep it <tone>.
Write a letter <mailreason>, in <length>.
Help me plan <project>.
Make a checklist for <project>.
Write a step-by-step guide for <project>, in a <tone> tone.
What should I think about before I start <project>?
*2 Do you agree? "<statement>." Give arguments for and against.
Write a <tone> paragraph that argues: <statement>.
Write a counterargument to this claim: "<statement>."
Translate into <language>: "<phrase>"
How do you say "<phrase>" in <language>? Explain each word.
Correct the grammar of this sentence and explain the changes: "<badgrammar>"
*2 Rewrite this sentence in a more <tone> way: "<phrase>"
*2 Rewrite the following text in <length>: "<passage>"
*2 Summarize this text in one sentence: "<passage>"
Turn this text into bullet points: "<passage>"
Write a title for this text and list its main ideas: "<passage>"
What questions does this text answer? "<passage>"
Rewrite this text for <audience>: "<passage>"
Extract the name, the city, the job and the age from this text as JSON: "<bio>"
Read the text and answer with a JSON object with the keys "name", "age" and "likes": "<bio>"
Extract every number in this text as a JSON list: "<bio>"
Put this information into a markdown table: "<bio> <bio2>"
What does a <trade> do on a normal day?
What skills does a <trade> need, and how can I learn them?
Write a job advertisement for a <trade> in <city>, in a <tone> tone.
Interview me for a job as a <trade>. Start with your first three questions.
What should I see in <city> in <n:2-5> days?
I am going to <city> in <month>. What should I pack?
Write a <tone> travel tip about <city> in <length>.
Tell me about the food, the weather and the transport in <city>.
Write a <tone> product description for a <single>.
Suggest <n:3-8> names for a shop that sells <ware>, and explain your favorite.
Plan a <event> for <n:6-40> guests with a budget of $<b:100-900>.
Write a toast for a <event> in a <tone> tone.
Write a recipe for <food> for <n:2-8> people.
How can I get better at <activity> in <n:2-8> weeks?
Write a weekly schedule for someone who loves <activity> and works on <day>.
Give me a <tone> motivational message about <activity>.
Hi! I am <person> and I like <activity>. What could I try next?
Can you recommend a gift for <person>, who likes <activity> and <activity2>?
Write a <form> for <person>, who has just started <activity>.
How do I take care of a <pet>?
Classify each item as a fruit, an animal or a tool, and answer as a list: <sortitems>.
Sort these words alphabetically and then by length: <sortitems>.
Which of these does not belong, and why? <sortitems>
Write one sentence that uses all of these words: <sortitems>.
Think of a riddle whose answer is "<single>".
What are the advantages and disadvantages of <topic>?
How has <topic> changed everyday life?
Teach me about <topic> by asking me one question at a time.
Imagine a world without <topic>. Describe a normal day in <length>.
What is the capital of <country>, and what is it known for?
Tell me three facts about <country>. Then tell me three about <country2>.
Compare the climate of <country> and <country2>.
Who was <figure>, and why is this person remembered?
What would <figure> say about <topic> today? Write it as a <form>.
Write a short biography of <figure> for <audience>.
Write an interview in which <figure> answers <n:3-5> questions from <role>.
<Person> is taller than <person2>. <Person2> is taller than <person3>. Who is the shortest? Explain your reasoning.
All <thing> in the <container> are <adj>. This one is not <adj>. Is it from the <container>? Explain.
<Person>, <person2> and <person3> sit in a row. <Person> is not at the left end, and <person2> sits directly right of <person3>. Who sits where?
Three boxes are labeled <thing>, <thing2> and mixed, and every label is wrong. How can you find out what is in each box by opening one of them?
If it is <day> today, which day will it be in <n:5-60> days? Explain how you found out.
<Person> has two sisters, and each sister has one brother. How many children are in the family? Explain.
Imagine you could only keep <n:2-4> of these: <topic>, <topic2>, <topic3>. Which ones and why?
Write a short review of a <place> in <city> for a travel site. Give <n:1-5> stars out of 5.
Rate this sentence from 1 to 10 for clarity and suggest a better one: "<badgrammar>"
Is this review positive, negative or mixed? Explain. "<review>"
Extract the product, the price and the opinion from this review as JSON: "<review>"
Reply politely to this customer: "<review>"
Define the word "<adj>" and use it in <n:2-4> sentences.
Give <n:3-6> synonyms and two antonyms of "<adj>".
Describe a <adj> <single> using all five senses.
Write <n:3-8> rhyming lines about a <adj> <pet> in <city>.
What happens if you mix <drink> and <drink2>?
Write a conversation in a <shop> between a <trade> and a customer who wants <ware>.
Give a <tone> answer to a child who asks: "<question>?"
""",
    "chat_ask": """
*14
Keep the answer short.
Use simple words.
*2 Answer in <length>.
Use headings and bullet points.
Write in a <tone> tone.
Give an example.
Do not use the word "very".
End with a question for me.
Start with the most important point.
Use at least one comparison.
Finish with a one-line summary.
Write your whole answer in lowercase.
Use markdown with bold key terms.
Avoid technical words.
Write at least <words:40-250:10> words.
Use exactly <paragraphs:2-6> paragraphs.
Include the words "<single>" and "<city>".
Mention <topic2> once.
Put the title in double angular brackets.
Separate the parts with a line of three stars.
Do not use any commas.
Answer in the form of a letter.
Give your answer as a JSON object with the keys "summary" and "details".
Start every sentence with a different letter.
Say what you are not sure about.
Explain your reasoning first.
Add a postscript that begins with P.S.
Highlight <phrases:2-4> phrases with *asterisks*.
Finish with the sentence "I hope this helps, <person>."
""",
    "passage": """
The <shop> on the corner opened in <y:1950-2015> and is run by <person>. It sells <ware> and <ware2>, and on <day>s it stays open until <h:7-10> in the evening. Many people come from <city> to visit it.
<Person> started <activity> at the age of <n:7-30>. At first it was difficult, but after <b:2-9> months of practice <person> joined a club in <city> and now teaches beginners every <day>.
Researchers in <city> asked <n:200-900> people how they spend their evenings. <Pct> said <activity>, <pct2> said <activity2>, and the rest could not decide. The study will be repeated in <month>.
The town council of <city> has decided to build a new <place>. It will cost <n:2-40> million dollars and open in <month>. Some residents are happy, while others would rather have a <place2>.
Last <month>, <person> and <person2> organized a <event>. <N:30-300> guests came, and the <food> were gone after an hour. They plan to do it again next year with more <drink>.
The <vehicle> to <city> was <n:20-90> minutes late because of heavy snow. <Person> used the time for <activity> and met <person2>, an old friend from school. They talked about <topic> until they arrived.
Many people think that <topic> is hard to understand. <Person>, a <trade> from <city>, disagrees. Every <day> <person> gives a free lesson at the <place> and uses <thing> to explain the idea.
""",
    "bio": """
<Person> is a <n:19-70>-year-old <trade> from <city> who loves <activity>.
My name is <person>. I am <n:19-70>, I live in <city>, and I work as a <trade>.
<Person>, aged <n:19-70>, moved to <city> in <y:1990-2020> to become a <trade> and now enjoys <activity> on <day>s.
In <city> lives a <trade> called <person>, who turned <n:19-70> in <month> and spends every <day> <activity>.
""",
    "review": """
I bought this <single> for $<a:5-120> in <month>. It is <adj>, but the handle broke after <n:2-9> weeks.
The <food> at the new <shop> in <city> were <adj> and cost only $<a:4-30>. We waited <n:5-60> minutes, though.
Best <single> I ever had! <N:2-9> months of daily use and it still looks <adj>. Worth every cent of the $<a:10-150>.
We visited the <place> on <day>. The staff was <adj>, the line was long, and the tickets were $<a:5-60>. Not again.
For $<a:8-90> I expected more from this <single>. The color is <adj> and the box was open when it arrived.
""",
    "badgrammar": """
<Person> have three <thing> and he want to buys more.
Yesterday we was going to the <place> but it were closed.
Me and <person> likes <activity> on the <day>.
The <shop> sell <ware> since ten years.
She don't know nothing about <topic>.
If I would have time, I would of visited <city> in <month>.
There is many <thing> in the <container> who belongs to <person>.
""",
    "sortitems": """
apple, hammer, <pet>, pear, saw
<pet>, banana, screwdriver, horse, plum
wrench, cherry, <pet>, drill, mango, cow
river, <single>, mountain, <pet>, lake
violin, <drink>, trumpet, <single>, piano
<city>, <city2>, <person>, <pet>
<activity>, <trade>, <single>, <city>
""",
    "code_ask": """
*4 Complete this Python function.
*4 Write the body of the following function.
*3 Implement the function below.
*3 Solve this programming problem in Python and make sure your code gives the results in the examples.
*3 Write a solution to this problem so that all of its examples pass:
*2 Finish the function so that the doctests pass.
*2 Please complete the code and explain it briefly.
*2 Here is a function without a body. Fill it in.
Write clean Python code for this task. Return only the code.
Complete the code. Use only the standard library.
Complete the following Python code without changing its signature.
Write the function, then show one more example of its use.
Implement this with a simple loop:
Implement this in one line if you can:
My tests call the function below. Write it so that they pass.
Read the docstring and write the missing code.
Provide a solution in a python code block:
*2 Can you write this function for me?
""",
    "snippet_ask": """
*3 Explain what this Python code does.
*2 Explain this code line by line.
*2 Write a docstring for this function.
*3 Write three unit tests for this function with pytest.
Rewrite this function with a plain for loop.
Make this code easier to read.
What does this function return for an empty list?
Add type hints and a docstring to this function.
Suggest a better name for this function and explain why.
Rewrite this function in JavaScript.
What is the time complexity of this function? Explain.
Review this code as a senior developer would.
*2 Add error handling to this function.
""",
    "code_chat": """
*2 Write a Python class for a <noun> with methods to <verb>, <verb2> and print it.
Write a Python program that asks the user for <n:2-5> <thing> and prints them sorted by length.
*2 Write a Python function that takes <argument> and returns <returned>.
*2 Write a Python function that takes <argument> and returns <returned>. Include <codeextra>.
Write a Python script that reads a CSV file of <thing> with the columns "name", "price" and "quantity" and prints the total value.
How do I <howto> in Python?
*2 Show me how to <howto> in Python, with a short example.
What is the difference between <pypair> in Python? Give an example.
Explain <concept> in Python with an example.
Write a SQL query that finds <sqlgoal> in a table "<table>" with the columns id, name, city, price and created_at.
Write a regular expression that matches <regexgoal>, and explain each part.
Write a shell command that <shellgoal>.
Write an HTML page with a heading, a list of <n:3-7> <thing> and a button.
Write a JavaScript function that takes <argument> and returns <returned>.
Write a small Python game in which the player <gamegoal>.
Write pytest tests for a function `<fname>` that takes <argument> and returns <returned>.
My Python program prints "<pyerror>". What does this mean, and how can I fix it?
Implement <algorithm> in Python and explain how it works.
*2 Implement <algorithm> in Python. Include <codeextra>.
Give the time and space complexity of <algorithm> and show a short Python version.
Write a command line tool in Python with argparse that <toolgoal>.
Design the Python functions of a program that <toolgoal>. Give each a signature and a docstring.
Write a Python dataclass for a <noun> with <n:3-5> fields and a method to <verb> it.
Write pseudocode for a program that <toolgoal>.
Here is the head of a CSV file: "name,price,city\\n<single>,<a:2-90>,<city>\\n<single2>,<b:2-90>,<city2>". Write Python code that reads it and prints <csvgoal>.
Write a Python function `<fname>(<args>)` that uses <concept>. Choose a sensible purpose and document it.
I have the list [<a:1-60>, <b:1-60>, <c:1-60>, <d:1-60>]. How do I <howto> or sort it in Python?
Convert this loop into a list comprehension: `for x in range(<a:2-60>): result.append(x * <b:2-12>)`.
Write a loop in Python that prints the numbers from <a:1-20> to <b:30-200> in steps of <c:2-9>.
Write a Python function that converts <a:2-90> <thing> in <n:2-9> <container>es into a sentence.
Write Python code that stores these items with their prices in a dictionary and prints the cheapest: <single> $<a:2-60>, <single2> $<b:2-60>, <single3> $<c:2-60>.
""",
    "code_chat_ask": """
*12
Add comments.
Include a short example of its use.
*2 Keep it simple.
Explain your solution afterwards.
Use type hints.
Handle errors.
Use only the standard library.
I am a beginner.
Show the output too.
Mention one common mistake.
Return only the code.
Explain each line.
""",
}
